"""The sharded transport's side of the update: each rank steps its shard of every parameter.

``gradients`` delivers this rank's shards of the averages; ``update`` steps them with the user's
optimizer, and ``gather`` brings the other ranks' shards under the next forward.
"""
