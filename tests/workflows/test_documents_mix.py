"""A recipe that puts several documents into a sequence of a family that mixes them ends before anything is parsed."""

from __future__ import annotations

import json

import pytest
import workflow_fakes as fakes
import yaml

from shardwright.schemas.errors import ExitCode, RecipeError
from shardwright.workflows.drive import drive


@pytest.mark.parametrize(("packing", "refused"), [(True, True), (False, False)])
def test_documents_that_a_family_mixes(inputs, request_of, approving, tmp_path, packing: bool, refused: bool) -> None:
    (inputs / "checkpoint" / "config.json").write_text(json.dumps({"model_type": "doge", "is_moe": True}))
    path = inputs / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["data"] |= {"document_mask": True, "packing": packing}
    path.write_text(yaml.safe_dump(recipe))
    if not refused:
        assert drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(), policy=approving).status == "finished"
        return
    with pytest.raises(RecipeError) as caught:
        drive(request_of(), tmp_path / "run", stages=fakes.fake_stages(), policy=approving)
    assert caught.value.code == "recipe/documents-mix" and caught.value.exit_code == ExitCode.USAGE
    assert "doge" in caught.value.what and "recipe.data.packing to false" in caught.value.next_action
    assert fakes.effects(tmp_path / "run") == []
