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
    hardware = fs.inspect.measure(comm, compute=seconds_of_units)  # speeds of links from a small model, in seconds
    print(fs.inspect.compare(predicted, trace.timeline(schedule)))
    fs.inspect.report("runs/a")  # a page about a run
"""

from fsharp.functional.layout.sharded import tree_nbytes as tree_nbytes
from fsharp.functional.reshard.reshard import reshard_nbytes as reshard_nbytes
from fsharp.functional.traffic import step_traffic as step_traffic
from fsharp.report.page import report as report
from fsharp.report.step import step_page as step_page
from fsharp.stateful.inspect.draw import draw as draw
from fsharp.stateful.inspect.estimate import Hardware as Hardware
from fsharp.stateful.inspect.estimate import predict as predict
from fsharp.stateful.inspect.perfetto import perfetto as perfetto
from fsharp.stateful.inspect.sharding import LeafSharding as LeafSharding
from fsharp.stateful.inspect.sharding import TreeSharding as TreeSharding
from fsharp.stateful.inspect.sharding import draw_sharding as draw_sharding
from fsharp.stateful.inspect.sharding import sharding as sharding
from fsharp.stateful.inspect.table import table as table
from fsharp.stateful.inspect.timeline import Timeline as Timeline
from fsharp.stateful.inspect.timeline import TimeSpan as TimeSpan
from fsharp.stateful.inspect.trace import Trace as Trace
from fsharp.stateful.inspect.trace import compare as compare
from fsharp.stateful.planning.choice import Candidate as Candidate
from fsharp.stateful.planning.choice import Choice as Choice
from fsharp.stateful.runtime.measure import measure as measure
