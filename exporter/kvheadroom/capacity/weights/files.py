"""What the files of a checkpoint tell of its weights: which part each tensor is of, in which type, and what is left over."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvheadroom.capacity.cache_settings import NotModelledError
from kvheadroom.capacity.stored_model import TensorInventory
from kvheadroom.capacity.weights.contradiction import another_checkpoint, first_of, size_text
from kvheadroom.capacity.weights.matching import Matching, Missing, match
from kvheadroom.capacity.weights.own_types import AS_CONFIGURED, OwnTypes, own_types
from kvheadroom.capacity.weights.parts import Blueprint
from kvheadroom.capacity.weights.schemes import Scheme
from kvheadroom.capacity.weights.stored import Matrix, is_head, is_mtp, sorted_out
from kvheadroom.capacity.weights.weight_plan import WeightPlan

# Files may hold buffers and scales of their own.
_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFiles:
    """A checkpoint's files against a blueprint.

    Attributes:
        tensors: None where there are no files, or files with a fault, of which nothing is taken.
        has_mtp: it has multi-token prediction.
        mtp_bytes, head_bytes: of multi-token prediction and of output layers; 0 where only names are known.
        matching: None where the headers are not known.
    """

    tensors: TensorInventory | None
    has_mtp: bool = False
    mtp_bytes: int = 0
    head_bytes: int = 0
    matching: Matching | None = None
    own: OwnTypes = AS_CONFIGURED


def read_files(blueprint: Blueprint, scheme: Scheme, tensors: TensorInventory | None) -> ReadFiles:
    """The tensors of each part.

    Raises:
        NotModelledError: only they could tell how parts are held, and do not.
    """
    layers = len(blueprint.layers)
    if tensors is None or tensors.problem:
        return ReadFiles(tensors=None)
    if not tensors.stored:
        mtp = [size or 0 for name, size in tensors.sizes.items() if is_mtp(name, layers)]
        heads = sum(size or 0 for name, size in tensors.sizes.items() if is_head(name))
        return ReadFiles(tensors=tensors, has_mtp=bool(mtp), mtp_bytes=sum(mtp), head_bytes=heads)
    stored = sorted_out(tensors.stored, layers)
    matching = match(blueprint, stored)
    if scheme.by_headers and matching.missing:
        raise NotModelledError(
            "how config.json quantizes this checkpoint is not modelled, and its headers have nothing for "
            + first_of([each.name for each in matching.missing])
        )
    return ReadFiles(
        tensors=tensors,
        has_mtp=stored.mtp_bytes > 0,
        mtp_bytes=stored.mtp_bytes,
        head_bytes=stored.head_bytes,
        matching=matching,
        own=own_types(blueprint, scheme, matching),
    )


def held_to_files(plan: WeightPlan, files: ReadFiles) -> WeightPlan | str:
    """The plan with what the checkpoint itself tells; a string where that is something else."""
    if files.tensors is None:
        return plan
    total = files.tensors.total_bytes
    if total is None:
        plan = _by_names(plan, has_mtp=files.has_mtp)
        return replace(plan, doubt=_NO_MTP if _lacks_mtp(plan, files) else "")
    has_head = any(term.name == "lm_head" for term in plan.terms)
    copies = 0 if has_head else files.head_bytes
    loaded = total - files.mtp_bytes - copies
    expected = plan.total_bytes - plan.not_loaded_bytes - _drafted(plan)
    sure = files.matching is not None and not files.matching.missing
    strangers = () if files.matching is None else _strangers(files.matching, has_head=has_head)
    if (not sure or strangers) and abs(loaded - expected) > _TOLERANCE * expected:
        missing = () if files.matching is None else files.matching.missing
        return another_checkpoint("weights to load", expected, loaded, _differences(missing, strangers))
    doubts = [_NO_MTP] if _lacks_mtp(plan, files) else []
    if files.own.told:
        doubts.append(_of_another_type(files.own.told))
    if files.own.cast:
        doubts.append(_cast(files.own.cast))
    if files.own.widened:
        doubts.append(_widened(files.own.widened))
    if sure and strangers:
        doubts.append(f"{_unknown(strangers)}; they are not counted")
    elif files.matching is not None:
        missing = tuple(each for each in files.matching.missing if strangers or not each.spared)
        if missing or strangers:
            doubts.append(f"{_differences(missing, strangers)}; the sums agree within 1%")
    if copies and len(plan.stage_bytes) == 1:
        doubts.append(_another_head(copies))
    unused = sum(each.size_bytes for each in strangers) if sure else 0
    return replace(
        plan,
        total_bytes=total,
        not_loaded_bytes=copies + unused + (0 if any(plan.draft_bytes) else files.mtp_bytes),
        basis="headers",
        doubt="; ".join(doubts),
    )


def _by_names(plan: WeightPlan, *, has_mtp: bool) -> WeightPlan:
    """The plan with what the names of an index tell: whether there is multi-token prediction."""
    left_out = 0 if has_mtp else plan.not_loaded_bytes
    return replace(
        plan,
        total_bytes=plan.total_bytes - left_out,
        not_loaded_bytes=plan.not_loaded_bytes - left_out,
        spare_bytes=plan.spare_bytes if has_mtp else 0,
        basis="index",
    )


_NO_MTP = "the checkpoint has no layer of multi-token prediction that this start would load, and vLLM does not start without"


def _lacks_mtp(plan: WeightPlan, files: ReadFiles) -> bool:
    """As `load_weights` in models/deepseek_mtp.py and `track_weights_loading` in model_loader/default_loader.py find."""
    return any(plan.draft_bytes) and not files.has_mtp


def _drafted(plan: WeightPlan) -> int:
    return sum(term.total_bytes for term in plan.terms if term.name == "draft")


def _strangers(matching: Matching, *, has_head: bool) -> tuple[Matrix, ...]:
    """Tensors of no part, but for an output layer beside a tied embedding."""
    return tuple(each for each in matching.left if has_head or not is_head(each.tensor.name))


def _differences(missing: Sequence[Missing], strangers: Sequence[Matrix]) -> str:
    found = []
    if missing:
        found.append(
            f"no tensor of its size for {len(missing)} of its parts: {first_of([each.name for each in missing])}"
        )
    if strangers:
        found.append(_unknown(strangers))
    return "; ".join(found)


def _unknown(strangers: Sequence[Matrix]) -> str:
    count = sum(each.tensor.count for each in strangers)
    names = first_of([each.tensor.name for each in strangers])
    some = "1 tensor is" if count == 1 else f"{count:,} tensors are"
    return f"{some} of no part that config.json makes, {size_text(sum(each.size_bytes for each in strangers))}: {names}"


def _of_another_type(names: Sequence[str]) -> str:
    return (
        f"{len(names)} matrices are stored in another type than config.json says, and are counted as they are stored: "
        + first_of(names)
    )


def _cast(names: Sequence[str]) -> str:
    return (
        f"{len(names)} matrices are stored in 16 bits or more although config.json quantizes them, and are counted in the 8 "
        f"bits that vLLM makes of them: {first_of(names)}"
    )


def _widened(names: Sequence[str]) -> str:
    return (
        f"{len(names)} matrices are stored in 8 bits although config.json does not quantize them, and are counted in the "
        f"model's dtype, which vLLM makes of them: {first_of(names)}"
    )


def _another_head(copy_bytes: int) -> str:
    return (
        f"the checkpoint has an output layer ({size_text(copy_bytes)}) although config.json ties it to the embedding: vLLM "
        "holds it only where the two differ, and it is counted as if they did not"
    )
