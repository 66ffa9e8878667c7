"""docs/evaluate_predict.md is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elasticdl_client.job_spec import flag_defaults
from tests.house.documents import REPOSITORY, bash_blocks, clone, run_page

PAGE = REPOSITORY / "docs" / "evaluate_predict.md"


def test_the_commands_of_the_page_are_sound_bash_and_their_flags_exist() -> None:
    script = "\n".join(bash_blocks(PAGE))
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    calls = re.findall(r"^elasticdl (\w+) (.*)$", script.replace("\\\n", " "), re.MULTILINE)
    assert [command for command, _ in calls] == ["train", "evaluate", "predict"]
    for command, flags in calls:
        assert set(re.findall(r"(?<![\w-])--([a-z_]+)", flags)) <= set(flag_defaults(command))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_page_works_word_for_word(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    said = run_page(PAGE, clone(tmp_path / "elasticdl"), Path(sys.executable).parent, 360, HOME=str(home))
    assert "evaluation: records 360, evaluated 360, repeated 0, lost 0" in said, said
    assert '{"step": 90, "metrics": {"accuracy": 0.' in said, said
    assert "prediction: records 360, predicted 360, repeated 0, lost 0" in said, said
    assert "_SUCCESS\npart-00000.csv\npart-00001.csv" in said, said
