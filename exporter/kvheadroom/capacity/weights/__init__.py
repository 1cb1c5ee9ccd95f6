"""Model weights: what each GPU holds of them."""

from kvheadroom.capacity.weights.plan import WeightPlan, WeightTerm, plan_weights, target_bytes

__all__ = ["WeightPlan", "WeightTerm", "plan_weights", "target_bytes"]
