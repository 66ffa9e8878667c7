"""An elastic group of processes that sum and share arrays: `ElasticGroup`, on native code, or NCCL.

It knows nothing of the master, of tasks and of frameworks: who is in a world, and when it ends, is told by the caller.
"""

from elasticdl.collective.errors import GroupLost
from elasticdl.collective.group import ElasticGroup, Peer, Reduction

__all__ = ["ElasticGroup", "GroupLost", "Peer", "Reduction"]
