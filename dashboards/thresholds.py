"""Limits that an alert of rules/kvheadroom.rules.yml has and a panel draws.

The rule file is where they are decided; a test holds these to it.
"""

KV_POOL_NEARLY_EXHAUSTED_RATIO = 0.9
