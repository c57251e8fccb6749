"""What the operator asked for: flags, the configuration file, feature gates, their precedence and validation."""
