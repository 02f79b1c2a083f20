"""`streamkv pull`: what it says of a checkpoint that is there."""

from __future__ import annotations

from streamkv.cli import main


def test_the_path_is_for_scripts_and_the_size_for_people(checkpoint, capsys):
    assert main(["pull", str(checkpoint)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{checkpoint}\n"
    num_bytes = sum(file.stat().st_size for file in checkpoint.iterdir())
    num_files = len(list(checkpoint.iterdir()))
    assert shown.err == f"{num_bytes / 2**20:.1f} MiB in {num_files} files (huggingface)\n"
    weights = checkpoint / "model.safetensors"
    assert main(["pull", str(weights)]) == 1
    assert capsys.readouterr().out == ""
