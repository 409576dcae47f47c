/**
 * Where the code is. python -m scripts.generate writes this from pyproject.toml.
 *
 * @module
 */
export const REPOSITORY = "https://github.com/parallel-dit/comfyui-parallel-dit";
