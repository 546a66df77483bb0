"""What was computed of a prompt stays cached if its client leaves in the middle.

SGLang stores each chunk of a long prompt in its tree when it plans the next one. If the request
is aborted meanwhile, it drops the chunk that it has just computed. A client that gives up sends
the same prompt again, as a rule, and an engine may compute such a chunk for seconds.

    fault     a request that is aborted in the middle of its prompt loses its last chunk
    hooks     group "last chunk"
    test      tests/compat/test_last_chunk.py
    upstream  no patch yet
    ends with a version that stores the chunk
"""

from sgl_ext.engine.core.hints import is_slice
from sgl_ext.engine.scheduler.state import is_plain
from sgl_ext.engine.sglang_types import Scheduler


def keep_last_chunk(scheduler: Scheduler) -> None:
    """Before `Scheduler.process_pending_chunked_abort`: stores the last chunk of the request that
    it aborts, as SGLang would do in this place for one that goes on."""
    req = scheduler._pending_chunked_abort_req
    if req is None or req is not scheduler.chunked_req or req.finished() or is_slice(req):
        return
    # Not what failed, and not where SGLang hands the chunk over to a decode engine.
    is_sound = req.discard_output_reason is None
    is_alone = req.session is None and req.beam_group is None
    if not (is_sound and is_alone and is_plain(scheduler.tree_cache)):
        return
    if scheduler.disaggregation_mode.value == "null" and (req.extend_end or 0) > req.prefix_len:
        scheduler.stash_chunked_request(req)
