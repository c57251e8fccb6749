"""Kubelet configuration: flags, configuration files, feature gates, their precedence and their validation.

- `load`: reads a command line and the files that it names; the entry point of the package.
- `flags`: the flags of the command line; `validation`: all checks of a configuration.
- `types`: KubeletConfiguration v1beta1 and its defaults; `codec`: strict decoding and encoding of it.
- `documents`: YAML and JSON files; `kubeconfig_file`: kubeconfig files.
- `feature_gates`: feature gates; `no_effect`: accepted settings without effect.
- `live`: fields that change at run time; `last_good`: the last configuration that was valid.
- `convert`: conversion of flags to a configuration file; `help`: output of `--help` and `--version`.
- `errors`: ConfigError with all problems.
"""
