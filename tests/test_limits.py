"""Sizes at which an index, a grid or a file's field would overflow are refused before anything is allocated."""
import pytest

from harness import SMALL, TRAIN, refused, run
from unet_io import Config, flags_of


@pytest.mark.parametrize("flags, says", [
    (dict(num_channels=1024, channel_mult=(8,), norm_groups=32), ["parameters", "2147483647", "--channel_mult"]),
    (dict(batch_size=65536), ["65536 images of 4 x 4", "--microbatch 65535"]),
    (dict(batch_size=65536, image_size=1024, channel_mult=(1, 1, 1, 1)), ["needs", "GB of memory", "--microbatch"]),
])
def test_too_large(flags, says):
    config = Config(**SMALL | flags)
    refused(TRAIN, *flags_of(config), "--dry_run", says=says)


def test_as_large_as_can_be():
    """The largest batch is refused at once and works in parts, and in a grid's 65535 rows."""
    flags = [*flags_of(Config(**SMALL | dict(batch_size=65536, num_head_channels=16))), "--dry_run"]
    assert "65536" in run(TRAIN, *flags, "--microbatch", 65535).stdout
    assert "65536" in run(TRAIN, *flags, "--microbatch", 1).stdout
