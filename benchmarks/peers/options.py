"""The command line of every peer."""

from __future__ import annotations

import argparse


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("tfrecord", help="directory of the TFRecord files")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of the steady state, which is measured")
    parser.add_argument("--optimizer", choices=["Adagrad", "Adam"], default="Adagrad")
    parser.add_argument("--num_ps", type=int, default=1)
    parser.add_argument("--num_workers", type=int, default=1)
    parser.add_argument("--serve", default="", help="the role and index of a server's process, such as ps:0")
    parser.add_argument("--cluster", default="{}", help="its cluster, as JSON")
    return parser.parse_args()
