//! Logs, to stderr, and traces, to a collector if one is named.

use groupcast_bus_config::shown::Shown;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use serde::{Deserialize, Deserializer};
use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Where a collector takes traces, below its address.
const TRACES_PATH: &str = "/v1/traces";

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Debug, Clone, Default, Args, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryOptions {
    /// Where an OpenTelemetry collector takes traces over HTTP, such as http://127.0.0.1:4318; without it none are kept
    #[arg(long, env = "GROUPCAST_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Which part of all changes is traced, from 0 to 1 [default: 1]
    #[arg(long, value_parser = ratio)]
    #[serde(deserialize_with = "written_ratio")]
    pub otlp_sample_ratio: Option<f64>,
}

fn ratio(text: &str) -> Result<f64, String> {
    within(text.parse().map_err(|error| format!("{error}"))?)
}

fn within(ratio: f64) -> Result<f64, String> {
    if (0.0..=1.0).contains(&ratio) { Ok(ratio) } else { Err("it is from 0 to 1".to_owned()) }
}

fn written_ratio<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    within(f64::deserialize(deserializer)?).map(Some).map_err(serde::de::Error::custom)
}

impl TelemetryOptions {
    /// What is not said here is taken from there.
    pub fn or(self, other: Self) -> Self {
        Self {
            otlp_endpoint: self.otlp_endpoint.or(other.otlp_endpoint),
            otlp_sample_ratio: self.otlp_sample_ratio.or(other.otlp_sample_ratio),
        }
    }
}

/// How often what was measured is folded into its summaries. Until then every single measurement is kept.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// Keeps what is counted, for `/metrics`. Once in a process. Whether anybody asks for it or not, it does not grow.
pub fn metrics() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new().install_recorder().context("cannot keep metrics")?;
    keep_up(handle.clone(), UPKEEP_EVERY).context("cannot keep metrics")?;
    Ok(handle)
}

/// Folds what was measured now and then; how often it did. A thread: there is no runtime yet, and there may be two later.
fn keep_up(kept: PrometheusHandle, every: Duration) -> std::io::Result<Arc<AtomicU64>> {
    let times = Arc::new(AtomicU64::new(0));
    let counted = times.clone();
    std::thread::Builder::new().name("metrics".into()).spawn(move || {
        loop {
            std::thread::sleep(every);
            kept.run_upkeep();
            counted.fetch_add(1, Ordering::Release);
        }
    })?;
    Ok(times)
}

/// Sends what is left when it is dropped.
pub struct Telemetry {
    provider: Option<SdkTracerProvider>,
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = self.provider.take()
            && let Err(error) = provider.shutdown()
        {
            eprintln!("the last traces could not be sent: {error}");
        }
    }
}

/// Logs from now on. What is logged is set by GROUPCAST_LOG, `usual` without it; traces hold every stage of every change that is sampled.
pub fn start(format: LogFormat, options: &TelemetryOptions, instance: &str, usual: &str) -> anyhow::Result<Telemetry> {
    let filter = EnvFilter::try_from_env("GROUPCAST_LOG").unwrap_or_else(|_| EnvFilter::new(usual));
    let provider = options.otlp_endpoint.as_deref().map(|endpoint| traces(endpoint, options, instance)).transpose()?;
    let exported = provider.as_ref().map(|provider| {
        let own = Targets::new().with_target("groupcast", Level::DEBUG);
        tracing_opentelemetry::layer().with_tracer(provider.tracer("groupcast")).with_filter(own)
    });
    let lines = tracing_subscriber::fmt::layer();
    let lines = match format {
        LogFormat::Text => lines.with_ansi(false).with_writer(|| Shown::text(std::io::stderr())).with_filter(filter).boxed(),
        LogFormat::Json => lines.json().with_writer(|| Shown::json(std::io::stderr())).with_filter(filter).boxed(),
    };
    // A second logger would be a mistake of ours; going on without one is better than not starting.
    let _ = tracing_subscriber::registry().with(exported).with(lines).try_init();
    Ok(Telemetry { provider })
}

fn traces(endpoint: &str, options: &TelemetryOptions, instance: &str) -> anyhow::Result<SdkTracerProvider> {
    // The HTTP client wants one before it is made, also for an address without TLS; whoever was first is as good.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let exporter = SpanExporter::builder().with_http().with_endpoint(address(endpoint)?).build()?;
    let service = KeyValue::new("service.instance.id", instance.to_owned());
    let ratio = options.otlp_sample_ratio.unwrap_or(1.0).clamp(0.0, 1.0);
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio))))
        .with_resource(Resource::builder().with_service_name("groupcast").with_attribute(service).build())
        .build())
}

fn address(endpoint: &str) -> anyhow::Result<String> {
    let Some(rest) = endpoint.strip_prefix("http://") else {
        anyhow::bail!("otlp_endpoint is {endpoint:?}: name a collector as http://HOST:PORT, and let one on this machine do TLS");
    };
    let bare = rest.trim_end_matches('/');
    Ok(if bare.contains('/') { endpoint.to_owned() } else { format!("http://{bare}{TRACES_PATH}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_named_with_or_without_its_path() {
        for (endpoint, expected) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
            ("http://collector:80/otlp/v1/traces", "http://collector:80/otlp/v1/traces"),
        ] {
            assert_eq!(address(endpoint).unwrap(), expected);
        }
        assert!(address("collector:4318").unwrap_err().to_string().contains("http://HOST:PORT"));
    }

    /// Pages of memory that this process has.
    fn resident() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn what_is_measured_and_never_asked_for_takes_no_memory() {
        const ROUNDS: usize = 50;
        const OF_A_ROUND: usize = 100_000;
        const PAGE_BYTES: usize = 4_096;
        let recorder = PrometheusBuilder::new().build_recorder();
        let times = keep_up(recorder.handle(), Duration::from_millis(1)).unwrap();
        let measured = metrics::with_local_recorder(&recorder, || metrics::histogram!("groupcast_test_seconds"));
        let mut before = 0;
        for round in 0..ROUNDS {
            (0..OF_A_ROUND).for_each(|number| measured.record(number as f64));
            // The next that begins has all of it, and the one after that says that it has ended.
            let told = times.load(Ordering::Acquire) + 2;
            while times.load(Ordering::Acquire) < told {
                std::thread::yield_now();
            }
            if round == 0 {
                before = resident();
            }
        }
        let grown = resident().saturating_sub(before) * PAGE_BYTES;
        let single = ROUNDS * OF_A_ROUND * size_of::<f64>();
        assert!(grown < single / 4, "{grown} bytes more after measurements of {single} bytes");
    }

    #[test]
    fn a_part_is_between_nothing_and_all() {
        assert_eq!((ratio("0"), ratio("1"), ratio("0.25")), (Ok(0.0), Ok(1.0), Ok(0.25)));
        assert!(ratio("1.1").is_err() && ratio("-0.1").is_err() && ratio("all").is_err());
    }
}
