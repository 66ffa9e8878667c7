"""The names of both distributions on a package index, and their version.

Not `elasticdl` and `elasticdl-client`: these names on the public index are the original's, of 2020 and 2021.
"""

from __future__ import annotations

RUNTIME = "elasticdl2"
CLIENT = "elasticdl2-client"
VERSION = "2.0.0"
