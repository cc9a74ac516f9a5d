"""Evidence: what leaves the installation so that others can check it. Reads the record, writes files."""
