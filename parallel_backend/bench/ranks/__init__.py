"""The processes that a timing runs on, and the cases that they run."""
