"""The process that imports archives: its end after any cancellation."""

import asyncio

from pykubelet.images.importer import _Ctr


async def test_end_cancelled_in_grace_period_kills_process() -> None:
    process = await asyncio.create_subprocess_exec(
        "sleep", "1000", stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    run = _Ctr(process)
    ending = asyncio.ensure_future(run.end())
    await asyncio.sleep(0.05)
    assert process.returncode is None
    ending.cancel()
    await asyncio.wait([ending])
    code = process.returncode
    if code is None:
        process.kill()
        await process.wait()
    assert code == -9
