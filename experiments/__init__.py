"""Studies, checks, tables and builders that the repository needs and the wheel does not."""
