"""What several families share: patches and checks of inputs, joint attention, ``BasicTransformerBlock``."""
