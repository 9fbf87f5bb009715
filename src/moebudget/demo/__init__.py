"""Demo on the small model that ships with the package: its data, its tasks and its run."""
