"""``arvideo distill`` of a YAML with an objective is an alignment."""

import pytest

from arvideo_rl.cli import align, distill


@pytest.mark.parametrize(("source", "aligns"), [("distill/dmd_tiny", True), ("distill/tiny", False)])
def test_an_objective_makes_a_distillation_an_alignment(source, aligns, monkeypatch):
    seen = []
    monkeypatch.setattr(align, "run", lambda *told: seen.append(told) or 0)
    monkeypatch.setattr(align, "show", lambda *told: None)
    assert distill.run([source], ["seed=3"], {"--dry-run"}) == 0
    assert seen == ([([source], ["seed=3"], {"--dry-run"})] if aligns else [])
