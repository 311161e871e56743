"""How far a step on ranks may be from a framework's own step: relative errors of the loss and of every gradient."""

from __future__ import annotations

# fp32, as the frameworks' own torch code computes the op; the controls miss it by far.
BAR = {"loss": 1e-6, "gradient": 3e-5}


def hold(found: dict[str, float]) -> None:
    """Every error is within its bar."""
    gradients = {name: error for name, error in found.items() if name != "loss"}
    assert found["loss"] < BAR["loss"], found["loss"]
    worst = max(gradients, key=lambda name: gradients[name])
    assert gradients[worst] < BAR["gradient"], (worst, gradients[worst])


def hold_control(found: dict[str, float]) -> None:
    """What was broken on purpose is far beyond the bars."""
    assert found["loss"] > 10 * BAR["loss"]
    assert max(found.values()) > 0.03
