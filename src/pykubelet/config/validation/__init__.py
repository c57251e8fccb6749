"""Validation of the configuration.

- `validate`: all checks; `validate_rules`: rules on single fields.
- `validate_resources`, `validate_serving`: checks of the fields on resources and on servers.
"""
