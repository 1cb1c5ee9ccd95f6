"""Real pages changed at random in ways that stay legal, or go wrong as pages do."""

import random
import re
from collections.abc import Callable

Lines = list[str]


def _position(lines: Lines, choice: random.Random) -> int:
    return choice.randrange(len(lines))


def _vllm_samples(lines: Lines) -> list[int]:
    return [i for i, line in enumerate(lines) if line.startswith("vllm:") and "_bucket{" not in line]


def insert_unrelated(lines: Lines, choice: random.Random) -> None:
    line = choice.choice(
        [
            "# a comment",
            "",
            'other_metric{a="vllm:kv_cache_usage_perc{engine=\\"0\\"} 0.9"} 1',
            'vllm:some_new_metric{engine="0",model_name="tiny"} 17',
            'vllm:kv_cache_usage_perc_of_another_kind{engine="0"} 0.7',
            'vllm:num_requests_running_max{engine="0",model_name="tiny"} 99',
        ]
    )
    lines.insert(_position(lines, choice), line)


def remove_line(lines: Lines, choice: random.Random) -> None:
    del lines[_position(lines, choice)]


def remove_sample(lines: Lines, choice: random.Random) -> None:
    found = _vllm_samples(lines)
    if found:
        del lines[choice.choice(found)]


def swap_samples(lines: Lines, choice: random.Random) -> None:
    found = _vllm_samples(lines)
    if len(found) > 1:
        one, other = choice.sample(found, 2)
        lines[one], lines[other] = lines[other], lines[one]


def _change_sample(change: Callable[[str, random.Random], str]) -> Callable[[Lines, random.Random], None]:
    def changed(lines: Lines, choice: random.Random) -> None:
        found = _vllm_samples(lines)
        if found:
            at = choice.choice(found)
            lines[at] = change(lines[at], choice)

    return changed


def _series(line: str) -> str:
    return line[: line.rindex("}") + 1] if "}" in line else line.split(maxsplit=1)[0]


def _other_value(line: str, choice: random.Random) -> str:
    value = choice.choice(
        ["0", "7", "0.25", "1e3", "1.5E+02", "5e-324", "NaN", "+Inf", "-Inf", "-3", "1.0", "007"]
    )
    return f"{_series(line)} {value}"


def _other_label_order(line: str, choice: random.Random) -> str:
    match = re.fullmatch(r"([^{]+)\{(.*)\} (\S+)", line)
    if match is None:
        return line
    labels = re.findall(r'\w+="[^"]*"', match[2])
    choice.shuffle(labels)
    return f"{match[1]}{{{','.join(labels)}{choice.choice(['', ','])}}} {match[3]}"


def _spaces(line: str, choice: random.Random) -> str:
    series = _series(line)
    value = line[len(series) :].split(maxsplit=1)[0]
    return (
        f"{series}{choice.choice(['  ', chr(9), '   '])}{value}{choice.choice(['', ' ', ' 1700000000000'])}"
    )


def _odd_model_name(line: str, choice: random.Random) -> str:
    name = choice.choice(['a\\"b', "c\\\\d", "e\\nf", "g}h", "i,j=k", "ünï", "x y", "tiny"])
    return line.replace('model_name="tiny"', f'model_name="{name}"')


def second_engine(lines: Lines, choice: random.Random) -> None:
    lines += [line.replace('engine="0"', 'engine="11"') for line in lines if 'engine="0"' in line]


def crlf(lines: Lines, choice: random.Random) -> None:
    for i, line in enumerate(lines):
        if line and not line.endswith("\r"):
            lines[i] = line + "\r"


LEGAL = [
    insert_unrelated,
    remove_line,
    remove_sample,
    swap_samples,
    _change_sample(_other_value),
    _change_sample(_other_label_order),
    _change_sample(_spaces),
    _change_sample(_odd_model_name),
    second_engine,
]


def mutate(page: str, choice: random.Random) -> str:
    """A page with one to eight changes that leave it a legal page."""
    lines = page.split("\n")
    for _ in range(choice.randint(1, 8)):
        choice.choice(LEGAL)(lines, choice)
    return "\n".join(lines).rstrip("\n") + "\n"
