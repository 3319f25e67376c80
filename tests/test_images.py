"""`megatron_rl.images`: placeholders of rows, and what tells one image from another."""

import pytest

from megatron_rl.images import (
    ImagePiece,
    check_pieces,
    digest_of_image,
    digest_of_numbers,
    num_placeholders,
    parts_an_image,
    pieces_between,
    pieces_of_tokens,
)

ONE, OTHER = "0123456789abcdef" * 2, "f" * 32
SMALL, WIDE = (1, 2, 4), (1, 4, 4)


def test_a_row_is_written_out_with_its_images_in_order():
    ids, pieces = pieces_of_tokens([5, 9, 7, 9, 9, 6], 9, [(ONE, SMALL), (OTHER, WIDE), (ONE, SMALL)], merge=2)
    assert ids == [5, 9, 9, 7, 9, 9, 9, 9, 9, 9, 6]
    assert pieces == (ImagePiece(1, ONE, SMALL, 2), ImagePiece(4, OTHER, WIDE, 4), ImagePiece(8, ONE, SMALL, 2))
    assert [piece.num_patches for piece in pieces] == [8, 16, 8]
    check_pieces(pieces, len(ids))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pieces_of_tokens([1, 2], 9, [(ONE, SMALL)], 2), "0 placeholders for 1 images"),
        (lambda: num_placeholders((1, 3, 4), 2), "3 x 4 patches cannot be merged 2 x 2"),
        (lambda: num_placeholders((0, 2, 2), 2), "0 x 2 x 2 patches"),
        (lambda: check_pieces([ImagePiece(3, ONE, SMALL, 2)], 4), "tokens 3 to 5 of a row of 4"),
        (lambda: check_pieces([ImagePiece(0, ONE, SMALL, 2), ImagePiece(1, ONE, SMALL, 2)], 9), "begins at token 1"),
        (lambda: pieces_between([ImagePiece(3, ONE, SMALL, 2)], 0, 4), "parts an image, tokens 3 to 5"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_cut_keeps_whole_images():
    pieces = (ImagePiece(1, ONE, SMALL, 2), ImagePiece(5, OTHER, SMALL, 2))
    assert pieces_between(pieces, 3, 8) == (ImagePiece(2, OTHER, SMALL, 2),)
    assert [place for place in range(9) if parts_an_image(pieces, place)] == [2, 6]


def test_a_digest_is_of_patches_and_grid():
    digests = {digest_of_image(*image) for image in [(b"ab", (1, 2, 4)), (b"ab", (1, 4, 2)), (b"ac", (1, 2, 4))]}
    assert len(digests) == 3 and {len(digest) for digest in digests} == {32}
    assert all(digest_of_numbers(*ImagePiece(0, one, SMALL, 2).numbers[2:]) == one for one in digests)
    assert ImagePiece(7, "01" + "0" * 14 + "f" * 16, SMALL, 2).numbers == (7, 2, 1, -1)
