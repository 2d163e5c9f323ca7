package debughttp

import (
	"net/http"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

type syncsAnswer struct {
	Syncs []syncText `json:"syncs"`
}

type syncText struct {
	Family          v1.IPFamily `json:"family"`
	Started         time.Time   `json:"started"`
	DurationSeconds float64     `json:"durationSeconds"`
	// QueuedSeconds is how long the oldest change waited; omitted without changes.
	QueuedSeconds float64 `json:"queuedSeconds,omitempty"`
	Full          bool    `json:"full"`
	Repair        bool    `json:"repair"`
	// Changes and ServicePorts count service ports.
	Changes      int `json:"changes"`
	ServicePorts int `json:"servicePorts"`
	Failed       int `json:"failed"`
	Writes       int `json:"writes"`
	Transactions int `json:"transactions"`
	Bytes        int `json:"bytes"`
	// KernelSeconds is how long the engine waited for the kernel.
	KernelSeconds float64     `json:"kernelSeconds"`
	FlowsDeleted  int         `json:"flowsDeleted"`
	Stages        []stageText `json:"stages"`
	Error         string      `json:"error,omitempty"`
}

type stageText struct {
	Name string `json:"name"`
	// AfterSeconds is the time from the start of the sync to the start of the stage.
	AfterSeconds    float64 `json:"afterSeconds"`
	DurationSeconds float64 `json:"durationSeconds"`
}

func (h *handler) syncs(*http.Request, query) (any, error) {
	return syncsAnswer{Syncs: converted(h.source.History(), syncOf)}, nil
}

func syncOf(r proxier.SyncReport) syncText {
	s := syncText{
		Family: r.Family, Started: moment(r.Started), DurationSeconds: r.Duration.Seconds(),
		Full: r.Full, Repair: r.Repair, Changes: r.Changes, ServicePorts: r.ServicePorts, Failed: r.Failed,
		Writes: r.Apply.Writes, Transactions: r.Apply.Transactions, Bytes: r.Apply.Bytes,
		KernelSeconds: r.Apply.Kernel.Seconds(), FlowsDeleted: r.FlowsDeleted,
		Stages: converted(r.Stages, func(s proxier.Stage) stageText {
			return stageText{
				Name: s.Name, AfterSeconds: s.Started.Sub(r.Started).Seconds(), DurationSeconds: s.Duration.Seconds(),
			}
		}),
		Error: errorText(r.Err),
	}
	if !r.Queued.IsZero() {
		s.QueuedSeconds = r.Started.Sub(r.Queued).Seconds()
	}
	return s
}
