package nodeproxy

import (
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

const modulePath = "github.com/serviceplane/serviceplane/nodeproxy"

// buildSetting returns a setting of the build, such as "vcs.revision"; "" if it is unknown, or
// the setting of another module, which has this one as a part.
func buildSetting(key string) string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Path == modulePath {
		for _, s := range info.Settings {
			if s.Key == key {
				return s.Value
			}
		}
	}
	return ""
}

// buildVersion returns the version of the module.
func buildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			if m.Path == modulePath && m.Version != "" {
				return m.Version
			}
		}
	}
	return "(unknown)"
}

// buildInfo is the metric kubernetes_build_info of Kubernetes' components. Its version is
// that of nodeproxy.
func buildInfo() prometheus.Collector {
	major, rest, _ := strings.Cut(strings.TrimPrefix(buildVersion(), "v"), ".")
	minor, _, ok := strings.Cut(rest, ".")
	if !ok {
		major, minor = "", ""
	}
	tree := map[string]string{"true": "dirty", "false": "clean"}[buildSetting("vcs.modified")]
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "kubernetes_build_info", Help: "Always 1; its labels are the version of nodeproxy.",
		ConstLabels: prometheus.Labels{
			"major": major, "minor": minor, "git_version": buildVersion(), "git_commit": buildSetting("vcs.revision"), "git_tree_state": tree,
			"build_date": buildSetting("vcs.time"), "go_version": runtime.Version(), "compiler": runtime.Compiler, "platform": runtime.GOOS + "/" + runtime.GOARCH,
		},
	})
	info.Set(1)
	return info
}
