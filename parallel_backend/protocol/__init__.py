"""What client, supervisor and ranks say to each other: messages, frames, tensors, the endpoint.

Only ``tensors`` imports torch.
"""
