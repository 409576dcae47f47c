"""The protocol between client, supervisor and ranks: messages, frames, tensors and the endpoint.

Only ``tensors`` imports torch.
"""
