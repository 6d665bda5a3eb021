"""The headers of WAL records, to find commit records in a range of WAL.

Source: src/include/access/xlogrecord.h (XLogRecord) and xlog_internal.h (XLogPageHeaderData), which
are the same in Postgres 9.5 to 18. A record may continue on the next page, behind its page header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pgcdc_assets.errors import DefiniteError
from pgcdc_assets.lsn import Lsn

# xl_tot_len, xl_xid, xl_prev, xl_info, xl_rmid, two bytes of padding, xl_crc.
_HEADER = struct.Struct("<IIQBBHI")
_ALIGNMENT = 8
_PAGE_HEADER_BYTES = 24
# The first page of a segment.
_LONG_PAGE_HEADER_BYTES = 40

# A record's header and the page headers before it and within it.
LONGEST_HEADER_BYTES = _HEADER.size + _PAGE_HEADER_BYTES + _LONG_PAGE_HEADER_BYTES

# Resource managers (rmgrlist.h), and the records of each in the upper bits of xl_info.
_XLOG, _XACT = 0, 1
_SWITCH, _SWITCH_MASK = 0x40, 0xF0
_COMMIT, _COMMIT_PREPARED, _XACT_MASK = 0x00, 0x30, 0x70


@dataclass(frozen=True, slots=True)
class WalRange:
    """A range of WAL.

    Attributes:
        start: LSN of the first byte.
        data: the bytes, page headers included.
        page_bytes: `wal_block_size`.
        segment_bytes: `wal_segment_size`.
    """

    start: Lsn
    data: bytes
    page_bytes: int
    segment_bytes: int

    def has_commit(self, first: Lsn, last: Lsn) -> bool:
        """Return whether a record from `first` to `last` is a commit record.

        The last record is the one that begins at `last`. Without this record, the bytes may end.

        Args:
            first: end of a record.
            last: end of a later record, or of the same.

        Raises:
            DefiniteError: the bytes are no WAL records.
        """
        position = int(first)
        previous: int | None = None
        while position <= last:
            begin = self._skip_page_header(position)
            raw = self._take(begin, _HEADER.size)
            if len(raw) < _HEADER.size:
                return False
            length, _, before, info, manager, padding, _ = _HEADER.unpack(raw)
            is_linked = before < begin if previous is None else before == previous
            if length < _HEADER.size or padding or not is_linked:
                raise DefiniteError(
                    reason=f"The WAL at {Lsn(begin)} has an unknown format, so a snapshot of a "
                    "standby has no LSN. Remove snapshot.dsn_env, and report the server's version."
                )
            if manager == _XACT and info & _XACT_MASK in (_COMMIT, _COMMIT_PREPARED):
                return True
            previous = begin
            position = self._end(begin, length)
            if manager == _XLOG and info & _SWITCH_MASK == _SWITCH:
                # The rest of the segment has no records.
                position = -(-position // self.segment_bytes) * self.segment_bytes
        return False

    def _end(self, begin: int, length: int) -> int:
        """Return the end of a record, where the header of the next page or record begins."""
        position = begin
        while length:
            position = self._skip_page_header(position)
            step = min(length, self.page_bytes - position % self.page_bytes)
            position += step
            length -= step
        return -(-position // _ALIGNMENT) * _ALIGNMENT

    def _take(self, position: int, count: int) -> bytes:
        """Return `count` bytes of records without page headers; less at the end of the range."""
        found = b""
        while len(found) < count:
            position = self._skip_page_header(position)
            step = min(count - len(found), self.page_bytes - position % self.page_bytes)
            offset = position - self.start
            part = self.data[offset : offset + step]
            found += part
            position += len(part)
            if len(part) < step:
                break
        return found

    def _skip_page_header(self, position: int) -> int:
        if position % self.segment_bytes == 0:
            return position + _LONG_PAGE_HEADER_BYTES
        if position % self.page_bytes == 0:
            return position + _PAGE_HEADER_BYTES
        return position
