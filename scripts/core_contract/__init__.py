"""Everything in ComfyUI that this project relies on, checked against a checkout without running it.

``python -m scripts.core_contract --types PATH`` prints one line for each difference and exits with 1 if there is any.
Run it on a new release of ComfyUI before anything else. It has two parts:

- mypy reads ``nodes/`` with the checkout's source (``typed.py``, ``mypy.ini``). It names what is missing, what a call
  lacks, and a method marked ``@override`` that overrides nothing or takes other arguments. No list is needed for that.
- ``lists/`` has what no type checker sees: names behind ``Any``, how ComfyUI calls ours and what it reads from it, keys
  and other strings, names and order of positional parameters, detection of models, nodes and their inputs. This part
  takes seconds, and without ``--types`` it runs alone.

To add an entry, write it into the module's block in ``lists/``, with the kind that fits:

- ``Calls("prepare_noise(latent_image, seed, noise_inds)")``: we call it so. Arguments before ``*`` go by position.
- ``Overrides("VAE.encode(pixel_samples)")``: ours replaces it, with these parameters.
- ``Has("CFGGuider", "conds cfg")``: a class, or with ``""`` the module, has these names.
- ``Passes("SDTokenizer.__init__", "tokenizer_class.from_pretrained(tokenizer_path, **kwargs)")``: core calls ours so.
- ``ReadsOnly("CLIP", "self.tokenizer", "tokenize_with_weights state_dict")``: core reads no other
  attribute of our stand-in.
- ``Mentions("gen_empty_tokens", "end pad")``: keys and names that we share with a function of core.
- ``Equals``, ``Detects`` and ``Node``: a constant, a supported model, a node with its inputs.

``by`` names our files, ``why`` says what they need it for. ``since=(0, 27, 0)`` leaves older checkouts out;
``optional=True`` is for what our code checks for before it uses it. tests/unit/scripts fails for an import or attribute
that mypy does not see and that is not listed, and for an entry that no file uses.
"""
