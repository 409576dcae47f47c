"""Parts that several families share: patches, joint attention, cuts of plain blocks."""
