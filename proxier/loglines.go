package proxier

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/serviceplane/serviceplane/changetracker"
)

// logFirstSync logs once that all IP families are programmed.
func (p *Proxier) logFirstSync() {
	if p.logged {
		return
	}
	fields := []zap.Field{zap.Duration("after", time.Since(p.created))}
	for _, f := range p.families {
		var status FamilyStatus
		f.locked(func() { status = f.recorded })
		if !status.Synced {
			return
		}
		fields = append(fields, zap.Int("servicePorts"+string(f.name), status.ServicePorts))
	}
	p.logged = true
	p.log.Info("the first sync is done", fields...)
}

// logFailures logs that syncs fail, once for each reason, and that they succeed again.
func (f *family) logFailures(o *outcome) {
	reason := ""
	if o.failure != nil {
		reason = o.failure.Error()
	}
	was := f.loggedFailure
	f.loggedFailure = reason
	switch {
	case reason != "" && reason != was:
		f.log.Warn("sync failed, will be retried", zap.Error(o.failure))
	case reason == "" && was != "":
		f.log.Info("sync succeeded after failures")
	}
}

// mostServiceLines is how many service ports one sync logs.
const mostServiceLines = 20

// logServices logs the service ports that fail now, or for another reason than before, and
// those that do not fail any more. Both lists are sorted.
func (f *family) logServices(before, now []*ServiceError) {
	var worse, better []*ServiceError
	for _, e := range now {
		if old := findFailure(before, e); old == nil || old.Err.Error() != e.Err.Error() {
			worse = append(worse, e)
		}
	}
	for _, e := range before {
		if findFailure(now, e) == nil {
			better = append(better, e)
		}
	}
	for _, e := range worse[:min(len(worse), mostServiceLines)] {
		f.log.Warn("service port is not programmed as it should be, will be retried", append(serviceFields(e.Name), zap.Error(e.Err))...)
	}
	for _, e := range better[:min(len(better), mostServiceLines)] {
		f.log.Info("service port does not fail any more", serviceFields(e.Name)...)
	}
	if rest := max(0, len(worse)-mostServiceLines) + max(0, len(better)-mostServiceLines); rest > 0 {
		f.log.Warn("further service ports fail, or do not any more: see Status.Failed", zap.Int("more", rest), zap.Int("failing", len(now)))
	}
}

// serviceFields name a service port.
func serviceFields(name changetracker.ServicePortName) []zap.Field {
	return []zap.Field{zap.Stringer("service", name), zap.String("protocol", string(name.Protocol))}
}

func findFailure(sorted []*ServiceError, like *ServiceError) *ServiceError {
	i, ok := slices.BinarySearchFunc(sorted, like, func(a, b *ServiceError) int { return a.Name.Compare(b.Name) })
	if !ok {
		return nil
	}
	return sorted[i]
}
