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
	if o.Err != nil {
		reason = o.Err.Error()
	}
	was := f.loggedFailure
	f.loggedFailure = reason
	switch {
	case reason != "" && reason != was:
		f.log.Warn("sync failed, will be retried", zap.Error(o.Err))
	case reason == "" && was != "":
		f.log.Info("sync succeeded after failures")
	}
}

// mostServiceLines is how many service ports one sync logs.
const mostServiceLines = 20

// serviceLines are what a sync logs about single service ports.
type serviceLines struct {
	failed, limited     []*ServiceError // now, or for another reason than before
	recovered, repaired []changetracker.ServicePortName
}

func (l *serviceLines) worse(before, now *ServiceError) {
	if before == nil || before.Err.Error() != now.Err.Error() {
		l.failed = append(l.failed, now)
	}
}

func (l *serviceLines) limit(before *port, now *ServiceError) {
	if before == nil || before.limited == nil || before.limited.Err.Error() != now.Err.Error() {
		l.limited = append(l.limited, now)
	}
}

func (l *serviceLines) better(name changetracker.ServicePortName, before *ServiceError, repaired bool) {
	if before != nil {
		l.recovered = append(l.recovered, name)
	}
	if repaired {
		l.repaired = append(l.repaired, name)
	}
}

// failures returns the first of those that have begun to fail.
func (l *serviceLines) failures() []*ServiceError {
	return slices.Clip(l.failed[:min(len(l.failed), MaxFailures)])
}

func (l *serviceLines) log(log *zap.Logger, failing int) {
	slices.SortFunc(l.failed, compareFailures)
	slices.SortFunc(l.recovered, changetracker.ServicePortName.Compare)
	slices.SortFunc(l.repaired, changetracker.ServicePortName.Compare)
	for _, e := range l.failed[:min(len(l.failed), mostServiceLines)] {
		text := "service port is not programmed as it should be, will be retried"
		if e.Terminal {
			text = "service port is not programmed as it should be, until it changes"
		}
		log.Warn(text, append(serviceFields(e.Name), zap.Error(e.Err))...)
	}
	slices.SortFunc(l.limited, compareFailures)
	for _, e := range l.limited[:min(len(l.limited), mostServiceLines)] {
		log.Warn("service port is not programmed in full: see Status.Problems", append(serviceFields(e.Name), zap.Error(e.Err))...)
	}
	for _, name := range l.recovered[:min(len(l.recovered), mostServiceLines)] {
		log.Info("service port does not fail any more", serviceFields(name)...)
	}
	if rest := max(0, len(l.failed)-mostServiceLines) + max(0, len(l.recovered)-mostServiceLines); rest > 0 {
		log.Warn("further service ports fail, or do not any more: see Status.Failed", zap.Int("more", rest), zap.Int("failing", failing))
	}
	for _, name := range l.repaired {
		log.Info("service port is repaired after it was damaged", serviceFields(name)...)
	}
}

// serviceFields name a service port.
func serviceFields(name changetracker.ServicePortName) []zap.Field {
	return []zap.Field{zap.Stringer("service", name), zap.String("protocol", string(name.Protocol))}
}
