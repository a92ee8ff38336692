"""A shell script is read as bash reads it: the same words, from the same script, by bash itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dstrain.config.imports.shell import Command, commands
from dstrain.errors import InvalidConfig

SCRIPTS = (
    "GLOBAL=128\nMICRO=4\nGPUS=8\ntrain --n $((GLOBAL / (MICRO * GPUS))) --m $(($GLOBAL/$GPUS/$MICRO))\n",
    'A=3; B=$((A > 2 ? 10 : 20)); train $B $((-7 / 2)) $((7 % 4 + 2**3)) "$((A))"\n',
    "train --a 1 \\\n  --b 2 \\\n  # --c 3 \\\n  --d 4\n",
    "E=; train --a 1 \\\n  --b 'two words' --c=\"$E\" \\\n\ntrain again\n",
    "train --out dir \\ \n  --deepspeed z3.json\n",
    "train --out dir\n  --deepspeed z3.json\n",
    'ARGS="\n  --n 8 \\\n  --m 2\n"\ntrain $ARGS x.py\n',
    'ARGS=(--lr 1e-4 --name "a b" # why\n  --seed 7)\nARGS+=(--more 1)\ntrain "${ARGS[@]}" ${#ARGS[@]} ${ARGS[1]}\n',
    "train ${A:-1} ${B:-${C:-2}} ${D:=3} $D ${D:+yes} ${E:+no} ${F-x}\n",
    "P=models/qwen3.sft.sh\ntrain ${P##*/} ${P%.*} ${P%%.*} ${P#*/} ${P/qwen3/llama} ${P//s/S} ${P:0:6} ${P^^} ${#P}\n",
    'train "a\\$b" \'a$b\' a\\ b "x\\\\y" "tab\\tx" --json \'{"a": 1}\' ""\n',
    'if [ -z "$X" ]; then X=1; else X=2; fi\ntrain $X\n',
    'X=5\nif [[ "$X" == "4" ]]; then Y=a; elif [ "$X" -gt 4 -a "$X" -lt 9 ]; then Y=b; else Y=c; fi; train $Y\n',
    '[ -z "$X" ] && X=7\n[[ -n "$X" && $X != 8 ]] || X=9\ntrain $X\n',
    'while [[ "$1" != "" ]]; do\n  case $1 in\n    -m | --model )\n shift\n M=$1\n ;;\n    * ) exit 1 ;;\n  esac\n'
    "  shift\ndone\ntrain ${M:-none}\n",
    'SIZE=7b\ncase "$SIZE" in\n  1*|3b) LR=1 ;;\n  7*)\n    LR=2\n    ;;\n  *) LR=3 ;;\nesac\ntrain $LR\n',
    "function usage() {\n  echo '\nUsage: train -m X\n'\n}\nrun() { train --lr $1 \"$@\"; }\nrun 1e-4 --x 2\n",
    "cat > cfg.txt <<'EOF'\ntrain --not 1\n'\nEOF\ntrain --yes 1 2>&1 | cat > /dev/null; train two &>/dev/null\n",
    "train a > /dev/null 2> err.txt && train b || train c\n",
    "for lr in 1e-4; do train --lr $lr; done\n",
    'eval "train --a 1"\nCMD="train --b 2"\n$CMD\n',
    'train $(expr 16 / 2) `expr 2 \\* 3` $(echo a b) "$(basename /x/y.sh .sh)" $(dirname /x/y) $(echo "8 / 3" | bc)\n',
    "train --a 1 \\\n  `# a comment` \\\n  --b 2\n",
    "OUT=out-$((1+1))x; export LR=1e-5 NAME=${OUT}_a; train \"$OUT\"/$NAME '#no' a#b\n",
    "{ train 1; }; (train 2; train 3)\nif true; then train 4; fi\nif false; then train 5; fi; ! false && train 6\n",
    "train \"['a', 'b']\" --x \"it's\" '$A \"b\"'\n",
    "A=0\nA=1 B=2 train $A\n",
    "set -euo pipefail\ndeclare -x N=2\nreadonly R=3\nlocal_=4\ntrain $N $R $local_ ; : ${Q:=8}; train $Q\n",
    'N=4\nLIST="a b"\nfor x in $LIST; do :; done\ntrain "$LIST" $LIST${N}c "$N"$LIST\n',
)
"""Scripts whose every command bash can tell without a program."""


def by_bash(script: str, folder: Path) -> list[list[str]]:
    """Returns the arguments of each call of `train` and of each command that bash does not find."""
    report = 'printf "%s\\n" "$#" "$@" | sed "s/^/:/" >> calls; echo . >> calls'
    stub = folder / "train"
    stub.write_text(f"#!/bin/bash\n{report}\n")
    stub.chmod(0o755)
    (folder / "s.sh").write_text(script)
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    subprocess.run(["bash", "s.sh"], cwd=folder, env=path, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    calls = (folder / "calls").read_text().split(".\n")[:-1]
    return [[line[1:] for line in call.splitlines()][1:] for call in calls]


@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.chdir(tmp_path)
    found = [command.texts[1:] for command in commands(script, "s.sh") if command.texts[0] == "train"]
    expected = [[word for word in call if word != " "] for call in by_bash(script, tmp_path)]
    if "|| train c" in script:
        found = found[:2]  # the program is taken to succeed
    assert sorted(found) == sorted(expected)


def one(script: str, **given: str) -> Command:
    return next(command for command in commands(script, "s.sh", given) if command.texts[0] == "train")


def test_what_is_given_comes_before_the_script_and_its_assignments_after() -> None:
    assert one("GPUS=${GPUS:-2}\ntrain $GPUS ${N:-1} $(nvidia-smi -L | wc -l)", GPUS="8", NPROC_PER_NODE="8").texts == [
        *("train", "8", "1", "8")
    ]
    assert one("GPUS=2\ntrain $GPUS", GPUS="8").texts == ["train", "2"]
    assert one("train $((BATCH / GPUS))\n", GPUS="8", BATCH="64").texts == ["train", "8"]


@pytest.mark.parametrize(
    ("script", "computed"),
    [
        ("train $(nproc)", "$(nproc)"),
        ("train --x $MISSING", "$MISSING"),
        ("train $((N / 2))", "$((N / 2))"),
        ("for lr in 1e-4 1e-5; do train $lr; done", "$lr, which has 2 values in a loop"),
        ("X=1\nif grep -q a b; then\n  X=2\nfi\ntrain $X", "$X, which line 3 sets under a condition"),
        ("MODEL=$1\ntrain $MODEL", "$1"),
    ],
)
def test_what_only_a_machine_can_tell_is_not_guessed(script: str, computed: str) -> None:
    (said,) = {word.computed for word in one(script).words if word.computed}
    assert said == computed


@pytest.mark.parametrize("script", ["train 'a\n", 'train "a\n', "train $(a\n", "train `a\n", "train ${a\n"])
def test_a_quote_without_end_is_an_error_with_its_place(script: str) -> None:
    with pytest.raises(InvalidConfig, match=r"s.sh:1:7: this quote is not closed"):
        list(commands(script, "s.sh"))


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    list(commands("touch a\nX=$(touch b) && `touch c`\neval 'touch d'; train $(expr 1 + 1; touch e)\n", "s.sh"))
    assert not list(tmp_path.iterdir())
