"""What the bridges rely on, a file a family. A file is in the contract because it is here."""
