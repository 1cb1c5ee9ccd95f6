"""Model weights: what each GPU holds of them."""

from kvheadroom.capacity.weights.plan import headers_may_tell, plan_weights, target_bytes
from kvheadroom.capacity.weights.weight_plan import DRAFT_MODEL, WeightPlan, WeightTerm

__all__ = ["DRAFT_MODEL", "WeightPlan", "WeightTerm", "headers_may_tell", "plan_weights", "target_bytes"]
