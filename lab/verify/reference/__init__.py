"""Families compared with reference tensors of another implementation, such as the authors' own code.

A folder of references has parts of two files each: ``NAME.json`` and, unless it is about text, ``NAME.safetensors``.
The JSON has the model's ``config``, the file of its ``weights``, and what its kind needs beside. Tensors are named
``CELL.in.*`` (inputs), ``CELL.mid.*`` (values on the way) and ``CELL.out*`` (results).
"""
