"""What the operator asked for: flags, configuration file, feature gates, their precedence and validation."""
