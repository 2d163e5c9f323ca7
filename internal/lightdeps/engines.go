package lightdeps

import (
	"go.uber.org/zap"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/proxier"
)

// Provider returns a proxy with a new engine for each IP family of the config.
func Provider[E proxier.Engine](config proxier.Config, deps proxier.Deps, engine func(v1.IPFamily) (E, error)) (*proxier.Proxier, error) {
	engines := map[v1.IPFamily]proxier.Engine{}
	for _, family := range config.Families {
		one, err := engine(family)
		if err != nil {
			return nil, err
		}
		engines[family] = one
	}
	return proxier.New(config, deps, engines)
}

// Logger returns the logger of an engine; log may be nil.
func Logger(log *zap.Logger, engine string, family v1.IPFamily) *zap.Logger {
	if log == nil {
		return zap.NewNop()
	}
	return log.Named(engine).With(zap.String("family", string(family)))
}
