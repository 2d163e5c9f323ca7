package debughttp

import (
	"net/http"

	"github.com/serviceplane/serviceplane/internal/answers"
	"github.com/serviceplane/serviceplane/proxier"
)

func (h *handler) syncs(*http.Request, query) (any, error) {
	return answers.Syncs{Syncs: converted(h.source.History(), syncOf)}, nil
}

func syncOf(r proxier.SyncReport) answers.Sync {
	s := answers.Sync{
		Family: string(r.Family), Started: moment(r.Started), DurationSeconds: r.Duration.Seconds(),
		Full: r.Full, Repair: r.Repair, Changes: r.Changes, ServicePorts: r.ServicePorts, Failed: r.Failed,
		Writes: r.Apply.Writes, Transactions: r.Apply.Transactions, Bytes: r.Apply.Bytes,
		KernelSeconds: r.Apply.Kernel.Seconds(), FlowsDeleted: r.FlowsDeleted,
		Stages: converted(r.Stages, func(s proxier.Stage) answers.Stage {
			return answers.Stage{
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
