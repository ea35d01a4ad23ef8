// The parts of Apache ECharts that the page draws with; everything else stays out of the bundle.
import { use } from "echarts/core";
import { CustomChart, LineChart } from "echarts/charts";
import {
  DataZoomInsideComponent,
  DataZoomSliderComponent,
  GridComponent,
  LegendPlainComponent,
  MarkAreaComponent,
  TooltipComponent,
} from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([
  CanvasRenderer,
  CustomChart,
  DataZoomInsideComponent,
  DataZoomSliderComponent,
  GridComponent,
  LegendPlainComponent,
  LineChart,
  MarkAreaComponent,
  TooltipComponent,
]);

export { getInstanceByDom, graphic, init } from "echarts/core";
