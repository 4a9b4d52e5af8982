"""Looking at schedules and layouts: tables, pictures, how long a step would take on hardware that one describes, or did take.

print(fs.inspect.table(schedule))
fs.inspect.draw(schedule, "step.png")
print(fs.inspect.sharding(layout))
print(fs.inspect.sharding(layout)["layers.0.w"])
fs.inspect.draw_sharding(layout, "sharding.png")

trace = step.trace()  # of a scheduled function; then some steps
hardware = fs.inspect.Hardware.fit(trace, schedule)
predicted = fs.inspect.predict(other_schedule, hardware)
print(fs.inspect.compare(predicted, trace.timeline(schedule)))
"""

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
