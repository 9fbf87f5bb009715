"""Will it help here: an estimate from a config.json, step times against fetched experts, and a verdict in words."""
