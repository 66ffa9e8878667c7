"""An elastic group of processes that sum and share arrays: `ElasticGroup`, on native code, or NCCL.

It knows nothing of the master, of tasks and of frameworks: the caller gives the members of a group and ends it.
"""

from elasticdl.collective.engine import GroupLost
from elasticdl.collective.group import ElasticGroup, Peer, Reduction

__all__ = ["ElasticGroup", "GroupLost", "Peer", "Reduction"]
