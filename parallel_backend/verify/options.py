"""The options of ``verify``, apart from what needs torch."""

import argparse

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="a checkpoint's folder or name: hold it itself to diffusers' forward, on the GPUs where there are any",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, help="of a MODEL; as the loader chooses without")
    parser.add_argument("--family", metavar="NAME", help="one family, such as flux; all without")
    parser.add_argument("--variant", metavar="NAME", help="one of its variants, such as dev; all without")
    parser.add_argument("--layout", metavar="LAYOUT", help='such as "cfg=2 ulysses=2"; those of the matrix without')
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="leave out layouts with another number of ranks; of a MODEL: how many"
    )
    parser.add_argument("--size", metavar="TxHxW", help="of the latent; HxW for images")
    parser.add_argument("--text-tokens", type=int, metavar="N", help="length of the text")
    parser.add_argument("--ci", action="store_true", help="the part of the matrix that CI runs")
    parser.add_argument("--named", action="store_true", help="the part with the shapes of real use")
    parser.add_argument(
        "--memory", action="store_true", help="instead: what sharded weights of 2 GB take of the ranks' memory"
    )
    parser.add_argument(
        "--warmup", metavar="N|all",
        help="instead: whole step loops of PipeFusion and displaced patch, with that many exact steps at the start, "
        "against the same algorithm on one process; with all of them, that is the exact one",
    )  # fmt: skip
    parser.add_argument(
        "--quality", action="store_true",
        help="instead: pictures of the shipped checkpoint in approximate layouts beside exact ones, as a table",
    )  # fmt: skip
    parser.add_argument(
        "--vae", metavar="KIND",
        help="instead: a VAE split by rows over --ranks N, against diffusers' own decode: a small random one such as "
        "image or wan21, or that of a checkpoint's folder",
    )  # fmt: skip
    parser.add_argument("--encode", action="store_true", help="with --vae: encode instead of decode")
    parser.add_argument("--width", type=int, metavar="N", help="with --vae: channels of its first level; 32 without")
    parser.add_argument("--json", action="store_true", help="as JSON")
