"""Checkpoints that ranks cannot use: put aside, and the next older one is taken."""

from __future__ import annotations

from tests.launch.hosts import Job
from tests.train.checkpoints.damage import HARMS

pytest_plugins = ("tests.launch.fixtures",)
STEPS = ("--set", "save_steps=4", "--set", "resume=auto")


def test_a_checkpoint_that_is_not_as_it_was_saved_is_put_aside_and_the_older_one_is_taken(light_job: Job) -> None:
    first = light_job.call("run", *STEPS, "--set", "max_steps=12")
    assert first.code == 0, first.said
    for step, harm in ((8, "4,000 bytes"), (12, "bit")):
        HARMS[harm](light_job.place.path / f"checkpoint-{step}" / "weights")
    again = light_job.call("run", *STEPS, "--set", "max_steps=16")
    assert again.code == 0, again.said
    for step in (8, 12):
        line = f"checkpoint-{step} is damaged (weights has another checksum than when it was saved): put aside as"
        assert f"warning: {line} checkpoint-{step}.damaged" in again.said
        assert (light_job.place.path / f"checkpoint-{step}.damaged" / "weights").exists()
    assert "starting again from step 4" in again.said
    assert sorted(light_job.losses()) == list(range(1, 17))


def test_without_an_older_one_training_does_not_start_over_by_itself(light_job: Job) -> None:
    first = light_job.call("run", *STEPS, "--set", "max_steps=4")
    assert first.code == 0, first.said
    HARMS["bit"](light_job.place.path / "checkpoint-4" / "weights")
    again = light_job.call("run", *STEPS, "--set", "max_steps=8", "--max-restarts", "2")
    assert again.code == 1, again.said
    assert "and there is no older one" in again.said
    assert "starts over; its files are in output/checkpoint-4.damaged" in again.said
    assert max(light_job.losses()) == 4
