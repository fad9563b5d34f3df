from pathlib import Path

import pytest

from channel_emu import LinkConfig
from fadefed.config import TomlFile
from fadefed.errors import ConfigError
from fadefed.federation import Federation
from tests.support import federation_text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rounds = 3", "runds = 3", "line 3.*no key 'runds'.*rounds"),
        ("rounds = 3", 'rounds = "three"', "line 3.*whole number"),
        ("rounds = 3", "rounds = true", "line 3.*whole number"),
        ("rounds = 3", "rounds = 0", "at least 1"),
        ('method = "mtfeel"', 'method = "magic"', "line 2.*Unknown method 'magic'.*mtfeel"),
        ("[method]", "[method]\neta = []", "line 9.*a number"),
        ("[method]", '[method]\non_outage = "pray"', "line 9.*'drop'"),
        ("[method]", "[method]\ndde_steps = -1", "dde_steps"),
        ("[method]", "[spaghetti]\n[method]", r"line 8.*unknown table \[spaghetti\]"),
        ("[method]", "[method", "not valid TOML"),
        ("[data]", '[data]\nsplit = "fair"', "line 11.*'cohorts'"),
        ("[data]", "[task]\nlayers = [784]\n[data]", "layers"),
        ("[data]", "[task]\nlayers = [784, 1.5]\n[data]", "line 11.*whole number"),
        ("[federation]", "[fed]", r"unknown table \[fed\]"),
        ("snr_db = 3.0", "snr = 3.0", "line 14.*no key 'snr'"),
        ("snr_db = 3.0", 'snr_db = "loud"', "line 14.*a number"),
        ("bandwidth_hz = 84833.3", "bandwidth_hz = -1", "above 0"),
    ],
)
def test_mistakes_are_named_with_their_line(old: str, new: str, words: str) -> None:
    text = federation_text()
    assert old in text
    with pytest.raises(ConfigError, match=f"(?s)test.toml.*{words}"):
        file = TomlFile.parse(text.replace(old, new, 1), "test.toml")
        Federation.from_file(file)
        LinkConfig.read(file)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml: cannot be read"):
        Federation.read(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        Federation.read(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"\[federation\] is missing"):
        Federation.from_file(TomlFile.parse("", "x"))


def test_defaults_and_integers_for_floats() -> None:
    fed = Federation.from_file(TomlFile.parse("[federation]\n[channel]\nsnr_db = [3, 5]\n"))
    assert fed.config.method == "mtfeel" and fed.task.layout.size == 25_450
    assert LinkConfig.read(fed.file).snr_db == [3.0, 5.0]
