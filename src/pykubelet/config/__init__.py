"""Kubelet configuration: flags, configuration files, feature gates, their precedence and their validation.

- `load`: reads a command line and the files that it names; the entry point of the package.
- `flags`: command line parser; `flag`: flag types; `flag_table`: all flags.
- `removed_flags`: flags of old versions that are rejected.
- `kubelet_flags`: settings that exist only as flags.
- `types`: KubeletConfiguration v1beta1 and its defaults; `codec`: strict decoding and encoding of it.
- `documents`: YAML and JSON files; `kubeconfig_file`: kubeconfig files.
- `feature_gates`: feature gates; `no_effect`: accepted settings without effect.
- `validate`: validation of a configuration; `validate_rules`: rules on single fields.
- `validate_resources`, `validate_serving`: checks of the fields on resources and on servers.
- `convert`: conversion of flags to a configuration file; `help`: output of `--help` and `--version`.
- `errors`: ConfigError with all problems.
"""
