"""An elastic group of processes that sum and broadcast arrays: `ElasticGroup`, on native code or NCCL.

It knows nothing of the master, of tasks, or of frameworks: the caller sets the members of a group, and ends it.
"""

from elasticdl.collective.engine import GroupLost
from elasticdl.collective.group import ElasticGroup, Peer, Reduction

__all__ = ["ElasticGroup", "GroupLost", "Peer", "Reduction"]
