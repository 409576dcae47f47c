"""What the doctor checks: one file a subject. Each check returns findings and raises for what it did not expect."""
