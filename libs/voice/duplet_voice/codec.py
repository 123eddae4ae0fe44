"""Codes of a row to its features: the decoding half of the residual quantiser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from duplet_core.errors import InvalidInput, Reason
from duplet_voice.features import ROW


class Codec:
    """Codebooks of one model. A row's features are the sum of one entry a book, scaled back."""

    def __init__(
        self,
        codebooks: NDArray[np.floating],
        mean: NDArray[np.floating],
        scale: NDArray[np.floating],
    ) -> None:
        """
        Args:
            codebooks: [books, entries, ROW], of (features - mean) / scale.
            mean, scale: [ROW].

        Raises:
            InvalidInput: INVALID_REQUEST; the shapes are others.
        """
        if codebooks.ndim != 3 or codebooks.shape[2] != ROW:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"codec: codebooks have shape {list(codebooks.shape)}, not [books, entries, {ROW}]",
            )
        for name, values in (("mean", mean), ("scale", scale)):
            if values.shape != (ROW,):
                raise InvalidInput(
                    Reason.INVALID_REQUEST,
                    f"codec: {name} has shape {list(values.shape)}, not [{ROW}]",
                )
        # Scaled once, so that a row costs a sum.
        self._codebooks = codebooks.astype(np.float32) * scale.astype(np.float32)
        self._mean = mean.astype(np.float32)

    @property
    def books(self) -> int:
        """Codes a row."""
        return len(self._codebooks)

    @property
    def entries(self) -> int:
        """Entries a book; codes are below it."""
        return int(self._codebooks.shape[1])

    def features(self, codes: NDArray[np.integer]) -> NDArray[np.float32]:
        """Features float32 [rows, ROW] of codes [rows, books]; the same bits row by row.

        Raises:
            InvalidInput: INVALID_REQUEST; the shape is another, or a code has no entry.
        """
        if codes.ndim != 2 or codes.shape[1] != self.books:
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"codes: shape {list(codes.shape)} is not [rows, {self.books}]",
            )
        wrong = np.argwhere((codes < 0) | (codes >= self.entries))
        if len(wrong):
            row, book = wrong[0]
            raise InvalidInput(
                Reason.INVALID_REQUEST,
                f"codes: row {row} book {book} has {codes[row, book]}, "
                f"not a code in [0, {self.entries})",
            )
        total = np.zeros((len(codes), ROW), np.float32)
        for book, entries in enumerate(self._codebooks):
            total += entries[codes[:, book]]
        total += self._mean
        return total


def load_codec(directory: Path) -> Codec:
    """The codec of a model's directory, `codec.safetensors`.

    Raises:
        InvalidInput: INVALID_REQUEST; the file is not there or holds something else.
    """
    path = directory / "codec.safetensors"
    try:
        tensors = load_file(path)
        return Codec(tensors["codebooks"], tensors["mean"], tensors["scale"])
    except (OSError, SafetensorError) as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"codec: {path}: {error}") from error
    except KeyError as error:
        raise InvalidInput(Reason.INVALID_REQUEST, f"codec: {path} has no {error}") from error
