"""Model versions that run: made from a configuration, warmed up, asked, and closed."""
