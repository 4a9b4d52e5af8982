"""Tables and pictures of schedules and layouts, bytes, and the time of a step: measured, or predicted for given hardware.

::

    print(fs.inspect.table(schedule))
    fs.inspect.draw(schedule, "step.png")
    Path("step.html").write_text(fs.inspect.step_page(schedule))  # an interactive picture
    print(fs.inspect.sharding(layout))
    print(fs.inspect.sharding(layout)["layers.0.w"])
    fs.inspect.draw_sharding(layout, "sharding.png")

    trace = step.start_trace()  # step is a scheduled function; now run some steps
    hardware = fs.inspect.Hardware.fit(trace, schedule)
    predicted = fs.inspect.predict(other_schedule, hardware)
    hardware = fs.inspect.measure(comm, compute_times=seconds_of_units)  # speeds of links from a small model, in seconds
    print(fs.inspect.compare(predicted, trace.timeline(schedule)))
    fs.inspect.report("runs/a")  # a page about a run

Further functions: step_traffic, the collectives of a step; tree_nbytes; reshard_sent_nbytes; perfetto, which writes a Timeline
to a file. Further classes: Trace; Timeline with TimeSpan; TreeSharding with LeafSharding; Choice with Candidate, of
``fs.tune``.
"""

from fsharp.functional.layout.sharded import tree_nbytes as tree_nbytes
from fsharp.functional.reshard.reshard import reshard_sent_nbytes as reshard_sent_nbytes
from fsharp.functional.traffic import step_traffic as step_traffic
from fsharp.inspect.drawing import draw as draw
from fsharp.inspect.hardware import Hardware as Hardware, predict as predict
from fsharp.inspect.measuring import measure as measure
from fsharp.inspect.shardings import (
    LeafSharding as LeafSharding,
    TreeSharding as TreeSharding,
    draw_sharding as draw_sharding,
    sharding as sharding,
)
from fsharp.inspect.tables import compare as compare, table as table
from fsharp.inspect.trace_events import perfetto as perfetto
from fsharp.planning.choice import Candidate as Candidate, Choice as Choice
from fsharp.report.page import report as report
from fsharp.report.step import step_page as step_page
from fsharp.stateful.timing.timeline import Timeline as Timeline, TimeSpan as TimeSpan
from fsharp.stateful.timing.trace import Trace as Trace
